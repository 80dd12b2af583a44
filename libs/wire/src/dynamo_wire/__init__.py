"""What transports between processes have in common: the messages of a call, and what each end keeps of it.

A transport brings what carries the messages. `dynamo_wire.brokered` has the rest for those that use a broker.
"""
