"""The Flower ClientApp: messages in, one client's defended update out."""
