"""Weights from and to Hugging Face. `FusedMoE.from_hf` makes a layer, `load_layer` reads its weights."""

from .block import Block as Block
from .block import Source as Source
from .families import FAMILIES as FAMILIES
from .families import REFUSED as REFUSED
from .families import blocks as blocks
from .layers import from_hf as from_hf
from .layers import load_layer as load_layer
from .layers import to_hf as to_hf
