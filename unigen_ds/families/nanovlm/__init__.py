"""nanoVLM: a language model that reads texts and tiled images, and writes texts (``VLM``)."""
