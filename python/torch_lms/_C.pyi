# The compiled core: csrc/extension/bindings.cpp says what each function does.
from typing import Any

def __getattr__(name: str) -> Any: ...
