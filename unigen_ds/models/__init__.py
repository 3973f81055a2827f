"""Layer 2: network layers, attention, losses and weights that several families share; no engine, no data file."""

from unigen_ds.models.vae import FluxAutoencoder as FluxAutoencoder
from unigen_ds.models.vae import PixelAutoencoder as PixelAutoencoder
