-- Of what each sale paid for and no promise needs.
--
-- An answer without its claim: the statement that writes an answer has changed its claim, and no claim is ever removed.
-- The foreign key locked the claim's row again.
ALTER TABLE paid_answers DROP CONSTRAINT paid_answers_identity_fkey;
-- A sealed body cannot be made smaller, so trying costs time; and one of a few kilobytes is written and read once or
-- twice, so it stands in its row, not in pieces in a table of its own.
ALTER TABLE paid_answers ALTER COLUMN sealed SET STORAGE EXTERNAL;
ALTER TABLE claims ALTER COLUMN settle_request SET STORAGE EXTERNAL;
ALTER TABLE paid_answers SET (toast_tuple_target = 8160);
ALTER TABLE claims SET (toast_tuple_target = 8160);
