-- Of what each reservation paid for and no promise needs.
--
-- An event without its payment: the two are written, archived and removed by the same transactions, and the audit looks
-- for one. The foreign key locked the payment's row again for each event.
ALTER TABLE payment_events DROP CONSTRAINT payment_events_payment_identifier_fkey;
-- One index by age, from which a list of one agent reads too. With an index that an agent leads, statements that were
-- planned on a young table, whose statistics nobody had gathered, went through all payments of an agent to find a key.
DROP INDEX payments_agent, payments_created;
CREATE INDEX payments_created ON payments (created, agent);
-- The open calls without a key are in payments_twin.
DROP INDEX payments_open_call;
CREATE INDEX payments_open_call ON payments (call_hash, agent)
    WHERE idempotency_key IS NOT NULL AND state IN ('reserved', 'in_doubt');
-- What is due is sorted again anyhow, agents taking turns.
DROP INDEX payments_due;
CREATE INDEX payments_due ON payments (due) WHERE state IN ('reserved', 'in_doubt');
