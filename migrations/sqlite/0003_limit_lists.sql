-- The version of the list that the rows of a source are: an older list does not replace a newer one. No row is version 0.
CREATE TABLE limit_lists (
    source  TEXT    NOT NULL PRIMARY KEY CHECK (source IN ('file', 'resource', 'operator')),
    version INTEGER NOT NULL CHECK (version >= 0),
    updated INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
