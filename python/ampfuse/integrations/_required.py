"""The sentence for a framework that is not installed."""

from importlib.util import find_spec


def require(package: str, module: str) -> None:
    """Raise unless the package that one of our modules needs is installed."""
    if find_spec(package) is None:
        raise ImportError(f"{module} needs {package}: pip install {package}")
