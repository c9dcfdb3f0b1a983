"""`aiotensor top`: what a running receiver and its senders hold, and how fast they send.

    command.py     the options, and the exit status
    watch.py       looks again and again, and draws each look on a terminal
    rates.py       how fast a sender sends, from two looks
    report.py      lines and JSON; view.py draws on a terminal
    words.py       what all of them write in the same way

How to look is `aiotensor.inspection`; nothing here speaks to anybody.
"""
