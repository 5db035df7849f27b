"""What Python statements bind, read, change and call: the dataflow that rewriting reasons with."""
