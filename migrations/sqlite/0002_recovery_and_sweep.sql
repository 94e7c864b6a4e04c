-- Recovery, sweep and the operator's word in a payment's history. SQLite cannot alter a CHECK, so the table is made anew
-- with its rows, numbers, index and triggers.

CREATE TABLE payment_events_new (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    payment_identifier TEXT    NOT NULL REFERENCES payments (payment_identifier),
    at                 INTEGER NOT NULL,
    event              TEXT    NOT NULL
        CHECK (event IN ('reserved', 'in_doubt', 'settled', 'released', 'answered', 'transaction', 'late_success',
            'recovery')),
    reason             TEXT,
    amount             TEXT,
    transaction_id     TEXT,
    evidence           TEXT    CHECK (evidence IN ('receipt', 'chain', 'operator')),
    -- What an operator wrote.
    note               TEXT    CHECK (length(note) BETWEEN 1 AND 500)
) STRICT;
INSERT INTO payment_events_new (id, payment_identifier, at, event, reason, amount, transaction_id, evidence)
    SELECT id, payment_identifier, at, event, reason, amount, transaction_id, evidence FROM payment_events ORDER BY id;
DROP TABLE payment_events;
ALTER TABLE payment_events_new RENAME TO payment_events;

CREATE INDEX payment_events_payment ON payment_events (payment_identifier, id);
CREATE TRIGGER payment_events_update BEFORE UPDATE ON payment_events
BEGIN
    SELECT RAISE(ABORT, 'payment_events is append-only');
END;
CREATE TRIGGER payment_events_delete BEFORE DELETE ON payment_events
BEGIN
    SELECT RAISE(ABORT, 'payment_events is append-only');
END;

-- The oldest due first, and of two that are due at once always the same.
DROP INDEX payments_due;
CREATE INDEX payments_due ON payments (due, payment_identifier) WHERE state IN ('reserved', 'in_doubt');
-- Keyless settled payments that nobody was given an answer of: what tidy looks through.
CREATE INDEX payments_unanswered ON payments (updated)
    WHERE state = 'settled' AND idempotency_key IS NULL AND answered IS NULL;
