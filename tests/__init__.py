"""All tests. What they make are graphs, young and many: the garbage collector looks at them less often than usual."""

import gc

gc.set_threshold(100_000, 20, 20)
