"""How a layer is stored and recognised: headers, payload, markers, one codec a format."""
