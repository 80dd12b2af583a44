"""Hook specifications, one module per area. pluggy is synchronous: decisions are objects, never hooks.

A plugin module implements what it wants with `hookimpl`; the function names are the hooks' names. Parameters may be
left out; adding one to a hook is not a breaking change, removing one goes through a deprecation (see CONTRIBUTING).
"""

import pluggy

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("dynamo")
hookimpl = pluggy.HookimplMarker("dynamo")
