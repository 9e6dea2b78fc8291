"""Weights from and to Hugging Face. `FusedMoE.from_hf` makes a layer, `load_layer` reads its weights."""

from .block import Block as Block
from .block import Source as Source
from .converting import convert as convert
from .converting import load as load
from .families import FAMILIES as FAMILIES
from .families import REFUSED as REFUSED
from .families import blocks as blocks
from .files import open_folder as open_folder
from .layers import from_hf as from_hf
from .layers import load_layer as load_layer
from .layers import to_hf as to_hf
