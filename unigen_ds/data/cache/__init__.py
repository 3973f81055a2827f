"""Arrays on disk, written once and mapped by several processes; the digest of data files, by which they are found."""
