"""The optional packages of the kits, extra ``testing``. Importing this module names a missing one."""

from __future__ import annotations

try:
    import pytest as pytest
    import pytest_asyncio as pytest_asyncio
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error.name} is not installed, and the kits that are classes of tests need it: "
        "pip install 'dynamo-testing[pytest]'; run_conformance needs neither"
    ) from error
