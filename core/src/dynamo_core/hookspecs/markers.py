"""The markers of specifications and implementations, apart so that neither imports the other."""

import pluggy

hookspec = pluggy.HookspecMarker("dynamo")
hookimpl = pluggy.HookimplMarker("dynamo")
