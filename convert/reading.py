"""A source as conversion sees it: layers from headers, then what values say where headers cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import QConvertError
from qconvert.formats.layers import Assumption, Inventory, take_inventory
from qconvert.runtime.roles import is_embedding_name

if TYPE_CHECKING:
    from qconvert.formats.evidence import Judgement


def read_source(
    checkpoint: Checkpoint, assume: Sequence[Assumption] = ()
) -> tuple[Inventory, list[Judgement]]:
    """Layers as they must be read, and what was judged from values. Raises as `take_inventory` does."""
    inventory = take_inventory(checkpoint, assume)
    return inventory, weigh_source(checkpoint, inventory)


def weigh_source(checkpoint: Checkpoint, inventory: Inventory) -> list[Judgement]:
    """What values say: layers are changed where they must be read otherwise (see `evidence.weigh`)."""
    if not any(layer.quantised for layer in inventory.layers.values()):
        return []
    # Here, for whoever only looks at unquantised values.
    from qconvert.formats.evidence import weigh

    return weigh(checkpoint, inventory, is_embedding_name)


def refuse_senseless(checkpoint: Checkpoint, judgements: Sequence[Judgement]) -> None:
    """Raise for what no reading makes sense of, values or an empty file: converting it would hide the fault."""
    if not checkpoint.tensors:
        raise QConvertError("the file holds no tensors", file=str(checkpoint.path), hint="get the file again")
    for judgement in judgements:
        if judgement.fatal:
            raise QConvertError(
                judgement.message,
                file=str(checkpoint.path),
                layer=judgement.layers[0],
                found=judgement.evidence,
                hint="get the file again, or say --assume 'REGEX=float8_e4m3fn' if it is right",
            )
