from dynamo_core.http.auth import PREFIX as PREFIX
from dynamo_core.http.auth import AdminToken as AdminToken
from dynamo_core.http.connection import set_probe as set_probe
from dynamo_core.http.errors import error_body as error_body
from dynamo_core.http.errors import error_response as error_response
from dynamo_core.http.health import metrics_route as metrics_route
from dynamo_core.http.listener import Listener as Listener
from dynamo_core.http.origins import foreign_page as foreign_page
from dynamo_core.http.origins import is_on_this_host as is_on_this_host
from dynamo_core.http.origins import refuse_pages as refuse_pages

__all__: list[str]
