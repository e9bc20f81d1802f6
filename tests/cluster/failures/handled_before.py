# submit: -N 1 --ntasks-per-node 1
# cause: python-error
# rank: 0
# host: 0
# line: ZeroDivisionError
# certain: no
import os
import traceback

try:
    os.stat("/no/such/shard-7")
except OSError:
    traceback.print_exc()
for step in range(6):
    print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
print(1 / (step - 5))
