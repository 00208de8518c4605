"""Planning: who writes and who reads which bytes. Pure functions of layouts, in numpy."""
