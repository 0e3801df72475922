"""What a node answers its clients: `answer` takes a request to its handler, of which there is a
module for each kind of request, with a table of its operations and the types of their arguments.
"""
