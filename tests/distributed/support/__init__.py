"""What tests of several ranks share: ranks, models, references and accounts."""
