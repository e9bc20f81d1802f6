"""The files of a run folder: for each its name, type, reader, writer, owner and rule of order.

| file | module | owner | rule of order |
|---|---|---|---|
| ``state.json`` | `state` | the job script or ``node.pyz`` | written beside and renamed |
| ``first_failure`` | `state` | the first rank that fails | first writer wins; removed before an attempt |
| ``attempts.jsonl`` | `attempts` | ``node.pyz`` | append only, but for the last line |
| ``summary.json``, its figures | `figures` | the program, then the reader of its log | written beside and renamed |
| ``control/`` | `control` | ``node.pyz``, ranks, the program | a file has one writer; ``suspects`` is append only |

Python 3.6, standard library: ``node.pyz`` takes this package along. A run folder may belong to another user: readers
open regular files of limited size only, check every type, and ignore keys that they do not know.
"""
