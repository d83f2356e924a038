"""Would it be served, and what comes out: contracts, families, loadable layers, verification."""
