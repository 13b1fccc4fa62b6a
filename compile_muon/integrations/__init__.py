"""Other people's trainers with a sharded model: one library a module, which imports it only when it is used."""
