"""Shards of a streamed data set, through local copies.

In: URLs or a user's own iterable. Out: ``RecordSource`` of one shard at a time. ``shard_list.py`` knows them,
``transfer.py`` fetches, ``spool.py`` keeps the copies within their limit.
"""
