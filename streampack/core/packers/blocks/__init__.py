"""Packers that need all lengths before the first pack. On a stream they pack one block after another.

- ``tumbling``: the base class, which cuts a stream into blocks and packs each block as a closed set.
- ``first_fit``, ``decreasing``: first fit, in shuffled order or longest first.
- ``best_fit``: longest first, each into the fullest pack with room.
- ``modified_first_fit``: first fit decreasing in which large samples get company first.
- ``knapsack``: longest first, each into the emptiest pack.
- ``karmarkar_karp``: packs that cost the same, by largest differencing.
- ``unpacked``: the original order, in packs of nearly the same number of samples.

These packers reproduce other systems' packs, for comparison. They know lengths and a budget, nothing else.
"""
