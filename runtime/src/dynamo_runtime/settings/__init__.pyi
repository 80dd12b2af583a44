from dynamo_http.settings import AuthSettings as AuthSettings
from dynamo_http.settings import HttpSettings as HttpSettings

from dynamo_runtime.settings.comparison import Change as Change
from dynamo_runtime.settings.comparison import changes as changes
from dynamo_runtime.settings.flag_table import FLAGS as FLAGS
from dynamo_runtime.settings.flag_table import PROCESS_NAMES as PROCESS_NAMES
from dynamo_runtime.settings.flag_table import Flag as Flag
from dynamo_runtime.settings.loader import LoadedSettings as LoadedSettings
from dynamo_runtime.settings.loader import SettingsView as SettingsView
from dynamo_runtime.settings.loader import load_settings as load_settings
from dynamo_runtime.settings.loader import view_settings as view_settings
from dynamo_runtime.settings.model import AdminSettings as AdminSettings
from dynamo_runtime.settings.model import AdmissionEntry as AdmissionEntry
from dynamo_runtime.settings.model import AdmissionSection as AdmissionSection
from dynamo_runtime.settings.model import ClientSettings as ClientSettings
from dynamo_runtime.settings.model import EventsSection as EventsSection
from dynamo_runtime.settings.model import ExtensionEntry as ExtensionEntry
from dynamo_runtime.settings.model import FrontendSection as FrontendSection
from dynamo_runtime.settings.model import LogSettings as LogSettings
from dynamo_runtime.settings.model import ModelSettings as ModelSettings
from dynamo_runtime.settings.model import PluginEntry as PluginEntry
from dynamo_runtime.settings.model import PluginSection as PluginSection
from dynamo_runtime.settings.model import Settings as Settings
from dynamo_runtime.settings.model import WorkerSettings as WorkerSettings
from dynamo_runtime.settings.schema import config_schema as config_schema

__all__: list[str]
