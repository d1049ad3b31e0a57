import ampfuse
import pytest
from ampfuse.patching import PARTS


@pytest.fixture
def patched():
    """Patch torch until the test ends or calls unpatch(), and count uses from zero."""
    for part in PARTS.values():
        part.usage.__init__(part.name)
    ampfuse.patch()
    yield
    ampfuse.unpatch()
