"""numpy, imported when something is first computed, and the names of arrays' types.

Importing numpy takes longer than reading a header of 10,000 tensors, and whoever looks at a header or plans from one
computes nothing. Modules that such commands load take `np` from here; it imports numpy at the first name asked of it
and has that name from then on, at numpy's own price. `sys.modules` holds nothing but numpy itself. The types are for
annotations alone, which are never evaluated.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["F32", "F64", "I8", "U8", "U32", "Array", "NDArray", "Raw", "np"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]
    I8 = NDArray[np.int8]
    Raw = NDArray[np.generic]
    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
else:
    Array = F32 = F64 = I8 = NDArray = Raw = U8 = U32 = Any
    np = ModuleType("numpy", "numpy, imported at the first name asked of it.")

    def _first(name: str) -> object:
        """What numpy calls `name`; threads that come at once wait for the one import and find the same object."""
        import numpy

        found = getattr(numpy, name)
        setattr(np, name, found)
        return found

    np.__getattr__ = _first
