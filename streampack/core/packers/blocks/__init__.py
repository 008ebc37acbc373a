"""Packers that need all lengths before the first pack. On a stream they pack one block after another.

- ``tumbling``: makes a packer of closed sets one of streams: it cuts the stream into blocks.
- ``first_fit``, ``decreasing``: first fit, in shuffled order or longest first.
- ``best_fit``: longest first, each into the fullest pack with room.
- ``modified_first_fit``: first fit decreasing in which large samples get company first.
- ``knapsack``: longest first, each into the emptiest pack.
- ``karmarkar_karp``: packs that cost the same, by largest differencing.
- ``unpacked``: the original order, in packs of nearly the same number of samples.

These are the packers of other systems, to compare and to reproduce. They know lengths and a budget, nothing else.
"""
