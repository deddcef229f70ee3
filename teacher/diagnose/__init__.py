"""Why a candidate differs: four cells, layer localisation, state between calls, and the arbiter."""
