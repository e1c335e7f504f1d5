package migrator_test

import (
	"slices"
	"testing"
)

// drifts are changes to the tables and the sentence that each is found by.
var drifts = []struct{ dialect, change, want string }{
	{"postgres", `ALTER TABLE outboxer_messages DROP COLUMN last_error`, `column "last_error" of table "outboxer_messages" is missing`},
	{"postgres", `ALTER TABLE outboxer_messages ALTER type TYPE varchar(9)`, `column "type" of table "outboxer_messages" has the type character varying(9) and not text`},
	{"postgres", `ALTER TABLE outboxer_messages ALTER payload DROP NOT NULL`, `column "payload" of table "outboxer_messages" allows NULL`},
	{"postgres", `ALTER TABLE outboxer_messages ALTER group_key SET NOT NULL`, `column "group_key" of table "outboxer_messages" does not allow NULL`},
	{"postgres", `ALTER TABLE outboxer_messages_meta DROP COLUMN paused_at`, `column "paused_at" of table "outboxer_messages_meta" is missing`},
	{"postgres", `DROP INDEX outboxer_messages_ready_idx`, `index "outboxer_messages_ready_idx" is missing`},
	{"postgres", `UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outboxer_messages_due_idx'::regclass`, `index "outboxer_messages_due_idx" is invalid: REINDEX it`},
	{"sqlite", `ALTER TABLE outboxer_messages DROP COLUMN last_error`, `column "last_error" of table "outboxer_messages" is missing`},
	{"sqlite", `ALTER TABLE outboxer_messages_meta DROP COLUMN paused_at`, `column "paused_at" of table "outboxer_messages_meta" is missing`},
	{"sqlite", `DROP INDEX outboxer_messages_ready_idx`, `index "outboxer_messages_ready_idx" is missing`},
}

func TestDrift(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		db := f.open(t)
		m := newMigrator(t, db, f.cfg)
		if err := m.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, d := range drifts {
			if d.dialect == string(f.cfg.Dialect) {
				exec(t, db, d.change)
				want = append(want, d.want)
			}
		}
		for _, index := range []string{"dead", "dead_at"} {
			exec(t, db, "DROP INDEX outboxer_messages_"+index+"_idx")
		}
		exec(t, db,
			"CREATE INDEX outboxer_messages_dead_idx ON outboxer_messages (outbox, id) WHERE status = 'dead'",
			"CREATE INDEX outboxer_messages_dead_at_idx ON outboxer_messages (outbox, dead_at)",
			// What was added is no drift.
			"ALTER TABLE outboxer_messages ADD COLUMN tenant text",
			"CREATE INDEX mine ON outboxer_messages (tenant)")
		want = append(want,
			`index "outboxer_messages_dead_idx" is on (outbox, id) and not (outbox, partitions, partition, id)`,
			`index "outboxer_messages_dead_at_idx" has no WHERE clause`)
		got := status(t, m).Drift
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("drift:\n%q, want\n%q", got, want)
		}
		// It still works: drift is for people to look at.
		if err := m.Up(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
