"""Planning: which rank writes and which rank reads which bytes. Pure functions of layouts, in numpy."""
