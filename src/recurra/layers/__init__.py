"""The parts of a block: mixers that remember (see base), and the projections and norms around them."""
