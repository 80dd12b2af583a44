from dynamo_http.admin_client import AdminClient as AdminClient
from dynamo_http.admin_client import admin_options as admin_options
from dynamo_http.admin_client import reason_of as reason_of
from dynamo_http.auth import PREFIX as PREFIX
from dynamo_http.auth import AdminToken as AdminToken
from dynamo_http.client_headers import check_session as check_session
from dynamo_http.connection import set_probe as set_probe
from dynamo_http.errors import error_body as error_body
from dynamo_http.errors import error_response as error_response
from dynamo_http.health import metrics_route as metrics_route
from dynamo_http.listener import Listener as Listener
from dynamo_http.origins import foreign_page as foreign_page
from dynamo_http.origins import is_on_this_host as is_on_this_host
from dynamo_http.origins import refuse_pages as refuse_pages
from dynamo_http.request_identity import principal_of as principal_of
from dynamo_http.request_identity import request_id_of as request_id_of
from dynamo_http.request_identity import set_request_id as set_request_id

__all__: list[str]
