"""Synthetic text for the bundled model: every sentence is written here, so its licence is the project's own.

Modules
    grammar   expands `{slot}` and `[this|that]` in a template
    words     word lists the slots draw from
    facts     small tables of true statements
    stories   plots told in beats, each beat with several wordings
    guides    how-tos, explanations, poems, short code
    chats     dialogues, in which later turns refer to earlier ones
    drills    repeated sequences that teach copying from the context
    mixture   the weighted stream of documents the trainer reads
"""
