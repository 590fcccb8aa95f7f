"""Where torch meets the pager: the tensor subclass, dispatch, adoption and raw access."""
