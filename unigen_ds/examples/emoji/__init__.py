"""Draw, read and edit emoji in colour: ``custom_imports`` of ``unified_emoji``.

``catalogue.py`` lists emoji, looks and words, ``dataset.py`` writes and reads their pictures and decides whether a
picture is right, ``model.py`` has the demo's own model and autoencoder, ``report_hook.py`` measures a finished run.
"""

from unigen_ds.examples.emoji.dataset import EmojiAccuracy as EmojiAccuracy
from unigen_ds.examples.emoji.dataset import EmojiDataset as EmojiDataset
from unigen_ds.examples.emoji.model import CosineAutoencoder as CosineAutoencoder
from unigen_ds.examples.emoji.model import EmojiFamily as EmojiFamily
from unigen_ds.examples.emoji.model import EmojiModel as EmojiModel
from unigen_ds.examples.emoji.model import EmojiTokenizer as EmojiTokenizer
from unigen_ds.examples.emoji.report_hook import EmojiReportHook as EmojiReportHook
