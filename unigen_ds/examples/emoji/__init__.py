"""Draw, read and edit emoji in colour: ``custom_imports`` of ``unified_emoji``."""

from unigen_ds.examples.emoji.dataset import EmojiAccuracy as EmojiAccuracy
from unigen_ds.examples.emoji.dataset import EmojiDataset as EmojiDataset
from unigen_ds.examples.emoji.model import CosineAutoencoder as CosineAutoencoder
from unigen_ds.examples.emoji.model import EmojiFamily as EmojiFamily
from unigen_ds.examples.emoji.model import EmojiModel as EmojiModel
from unigen_ds.examples.emoji.model import EmojiTokenizer as EmojiTokenizer
from unigen_ds.examples.emoji.report_hook import EmojiReportHook as EmojiReportHook
