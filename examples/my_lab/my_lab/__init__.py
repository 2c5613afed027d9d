"""What a lab adds to gpt_pretrain, one module for each; `extensions=[my_lab.callbacks]` imports one of them."""
