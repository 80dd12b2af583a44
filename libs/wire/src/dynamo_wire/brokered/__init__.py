"""Calls and events over a message broker: everything but the connection with it.

A plugin brings a `Broker`, which sends messages to addresses and hears those of its own, and gets a transport. Nothing
here relies on what a broker keeps or promises: a *link* of one caller and one worker numbers its messages in each
direction, and is over when one of them is missing. `BrokeredTransport` puts the parts together.
"""
