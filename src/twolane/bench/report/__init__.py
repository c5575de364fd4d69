"""`twolane bench report`: figures, timelines and the page that holds them."""
