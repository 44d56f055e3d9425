"""Sources made of drawings: four emoji sets (`emoji`) and four icon families (`icons`), from packages to shards."""
