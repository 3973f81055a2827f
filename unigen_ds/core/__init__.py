"""Values that every package uses; nothing of files, processes or configs. Errors are subclasses of ``UnigenError``."""
