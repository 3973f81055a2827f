"""Floor 2: ``forward(PackedBatch) -> LossTerms``. Models know no engine and no file format of a data set."""

from unigen_ds.models.decoder_lm import DecoderLM as DecoderLM
from unigen_ds.models.flux_vae import FluxAutoencoder as FluxAutoencoder
from unigen_ds.models.unified import UnifiedModel as UnifiedModel
from unigen_ds.models.vae import PixelAutoencoder as PixelAutoencoder
from unigen_ds.models.vlm import VLM as VLM
