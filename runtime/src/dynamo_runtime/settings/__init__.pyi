from dynamo_core.settings.comparison import Change as Change
from dynamo_core.settings.comparison import changes as changes
from dynamo_core.settings.flags import FLAGS as FLAGS
from dynamo_core.settings.flags import PROCESS_NAMES as PROCESS_NAMES
from dynamo_core.settings.flags import Flag as Flag
from dynamo_core.settings.loader import LoadedSettings as LoadedSettings
from dynamo_core.settings.loader import SettingsView as SettingsView
from dynamo_core.settings.loader import load_settings as load_settings
from dynamo_core.settings.loader import view_settings as view_settings
from dynamo_core.settings.model import AdminSettings as AdminSettings
from dynamo_core.settings.model import AdmissionEntry as AdmissionEntry
from dynamo_core.settings.model import AdmissionSection as AdmissionSection
from dynamo_core.settings.model import AuthSettings as AuthSettings
from dynamo_core.settings.model import ClientSettings as ClientSettings
from dynamo_core.settings.model import EventsSection as EventsSection
from dynamo_core.settings.model import ExtensionEntry as ExtensionEntry
from dynamo_core.settings.model import FrontendSection as FrontendSection
from dynamo_core.settings.model import HttpSettings as HttpSettings
from dynamo_core.settings.model import LogSettings as LogSettings
from dynamo_core.settings.model import ModelSettings as ModelSettings
from dynamo_core.settings.model import PluginEntry as PluginEntry
from dynamo_core.settings.model import PluginSection as PluginSection
from dynamo_core.settings.model import Settings as Settings
from dynamo_core.settings.model import WorkerSettings as WorkerSettings
from dynamo_core.settings.schema import config_schema as config_schema

__all__: list[str]
