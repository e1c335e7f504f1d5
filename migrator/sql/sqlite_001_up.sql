-- Times are microseconds since 1970 UTC. An id is never used again.
CREATE TABLE {messages} (
    id           INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    inserted_at  INTEGER NOT NULL,
    scheduled_at INTEGER,
    delivered_at INTEGER,
    dead_at      INTEGER,
    due_at       INTEGER,
    attempts     INTEGER NOT NULL DEFAULT 0,
    partition    INTEGER NOT NULL,
    partitions   INTEGER NOT NULL,
    outbox       TEXT    NOT NULL,
    status       TEXT    NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'delivered', 'dead')),
    group_key    TEXT,
    type         TEXT    NOT NULL,
    headers      TEXT    NOT NULL DEFAULT '{}',
    payload      BLOB    NOT NULL,
    last_error   TEXT
);

CREATE INDEX {ready} ON {messages} (outbox, partitions, partition, id)
    WHERE status = 'pending' AND scheduled_at IS NULL;

CREATE INDEX {due} ON {messages} (outbox, partitions, partition, scheduled_at, id)
    WHERE status = 'pending' AND scheduled_at IS NOT NULL;

CREATE INDEX {failed} ON {messages} (outbox, partitions, partition, id)
    WHERE status = 'pending' AND attempts > 0;

CREATE INDEX {dead} ON {messages} (outbox, partitions, partition, id)
    WHERE status = 'dead';

CREATE INDEX {dead_at} ON {messages} (outbox, dead_at)
    WHERE status = 'dead';

CREATE INDEX {delivered} ON {messages} (outbox, delivered_at)
    WHERE status = 'delivered';

-- The row of outbox '' is about the tables themselves.
CREATE TABLE {meta} (
    outbox         TEXT    PRIMARY KEY NOT NULL,
    schema_version INTEGER,
    installation   TEXT,
    partitions     INTEGER NOT NULL DEFAULT 1,
    superseded     TEXT    NOT NULL DEFAULT '',
    ordering       TEXT    NOT NULL DEFAULT 'by_group',
    epoch          INTEGER NOT NULL DEFAULT 0,
    paused_at      INTEGER
);

INSERT INTO {meta} (outbox, schema_version, installation)
VALUES ('', 1, lower(hex(randomblob(8))));
