package dialect

import (
	"context"
	"fmt"

	"github.com/gormoutbox/outbox/engine"
)

// The statements take the group locks, then read the partition count, then
// draw the ids: the lock is in a condition on the whole statement, which the
// executor checks before it produces the first row. (A CTE that nothing refers
// to is dropped, and a lock in a VALUES list comes after the id.) Locks are
// taken in the order of their keys, so that two adds of the same groups cannot
// deadlock.
const (
	pgGroupLocks = `(SELECT count(pg_advisory_xact_lock(s.k)) FROM (SELECT DISTINCT ({oid} << 32) | k AS k FROM unnest($1::bigint[]) k ORDER BY 1) s) >= 0`

	// pgGroupLock is the same for a single row and its one lock, or none if $1
	// is NULL: the server has fewer parts to set up and to take down.
	pgGroupLock = `($1::bigint IS NULL OR (SELECT pg_advisory_xact_lock(({oid} << 32) | $1::bigint)) IS NOT NULL)`

	pgColumns = `(outbox, partitions, partition, group_key, type, payload, headers, scheduled_at)`

	// OFFSET 0 keeps the partition count from being looked up for each use.
	pgInsertOne = `
INSERT INTO {messages} ` + pgColumns + `
SELECT $2::text, f.n, ($3::bigint % f.n)::smallint, $4::text, $5::text, $6::bytea, $7::text::jsonb,
	CASE WHEN $8::timestamptz > statement_timestamp() THEN $8::timestamptz
	WHEN $9::bigint > 0 THEN statement_timestamp() + $9::bigint * interval '1 microsecond' END
FROM (SELECT COALESCE((SELECT partitions FROM {meta} WHERE outbox = $2::text), 1)::smallint AS n OFFSET 0) f
WHERE ` + pgGroupLock

	pgInsertMany = `
INSERT INTO {messages} ` + pgColumns + `
SELECT u.outbox, f.n, (u.hash % f.n)::smallint, NULLIF(u.group_key, ''), u.type, u.payload, u.headers::jsonb,
	CASE WHEN timestamptz 'epoch' + u.at * interval '1 microsecond' > statement_timestamp() THEN timestamptz 'epoch' + u.at * interval '1 microsecond'
	WHEN u.delay > 0 THEN statement_timestamp() + u.delay * interval '1 microsecond' END
FROM unnest($2::text[], $3::bigint[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::bigint[], $9::bigint[])
	WITH ORDINALITY AS u(outbox, hash, group_key, type, payload, headers, at, delay, ord)
JOIN (SELECT o.outbox, COALESCE((SELECT m.partitions FROM {meta} m WHERE m.outbox = o.outbox), 1)::smallint AS n
	FROM (SELECT DISTINCT o AS outbox FROM unnest($2::text[]) u(o)) o) f ON f.outbox = u.outbox
WHERE ` + pgGroupLocks + `
ORDER BY u.ord`

	pgReturning = `
RETURNING id, partition, inserted_at, COALESCE(scheduled_at, inserted_at), (SELECT installation FROM {meta} WHERE outbox = '')`
)

// Insert implements engine.Storage. The first statement of the call takes the
// locks of all tables.
func (p *Postgres) Insert(ctx context.Context, tx engine.Tx, rows []engine.Row, returning bool) ([]engine.Envelope, error) {
	byTable := make(map[*pgTable][]int, 1)
	var order []*pgTable
	for i := range rows {
		t, err := p.table(rows[i].Outbox)
		if err != nil {
			return nil, err
		}
		if byTable[t] == nil {
			order = append(order, t)
		}
		byTable[t] = append(byTable[t], i)
	}
	if len(order) > 1 {
		if err := p.lockGroups(ctx, tx, rows); err != nil {
			return nil, err
		}
	}
	var envelopes []engine.Envelope
	if returning {
		envelopes = make([]engine.Envelope, len(rows))
	}
	for _, t := range order {
		if err := p.insert(ctx, tx, t, rows, byTable[t], len(order) == 1, envelopes); err != nil {
			return nil, fmt.Errorf("insert into %s: %w", t.name.Messages(), err)
		}
	}
	return envelopes, nil
}

// insert adds the rows with the given indexes to their table.
func (p *Postgres) insert(ctx context.Context, tx engine.Tx, t *pgTable, rows []engine.Row, at []int, lock bool, envelopes []engine.Envelope) error {
	var text string
	var args []any
	if len(at) == 1 {
		text, args = t.sql.insertOne, p.oneRow(&rows[at[0]], lock)
	} else {
		text, args = t.sql.insertMany, p.manyRows(rows, at, lock)
	}
	if envelopes == nil {
		_, err := tx.ExecContext(ctx, text, args...)
		return err
	}
	found, err := tx.QueryContext(ctx, text+t.sql.returning, args...)
	if err != nil {
		return err
	}
	defer found.Close()
	n := 0
	for ; found.Next(); n++ {
		env := envelopeOf(&rows[at[n]])
		if err := found.Scan(&env.ID, &env.Partition, &env.InsertedAt, &env.ScheduledAt, &env.Installation); err != nil {
			return err
		}
		env.DueAt = env.ScheduledAt
		envelopes[at[n]] = env
	}
	return found.Err()
}

func envelopeOf(r *engine.Row) engine.Envelope {
	return engine.Envelope{Outbox: r.Outbox, GroupKey: r.GroupKey, Type: r.Type, Payload: r.Payload, Headers: r.Headers}
}

func (p *Postgres) oneRow(r *engine.Row, lock bool) []any {
	var key, group, at any
	if r.GroupKey != "" {
		group = r.GroupKey
	}
	if !r.DeliverAt.IsZero() {
		at = r.DeliverAt
	}
	if lock && r.Lock {
		key = groupLock(r)
	}
	return []any{key, r.Outbox, int64(r.Hash), group, r.Type, payloadOf(r), encodeHeaders(r.Headers), at, r.Delay.Microseconds()}
}

func (p *Postgres) manyRows(rows []engine.Row, at []int, lock bool) []any {
	n := len(at)
	var (
		locks                          = []int64{}
		outboxes, groups, types, heads = make([]string, n), make([]string, n), make([]string, n), make([]string, n)
		hashes, dues, delays           = make([]int64, n), make([]int64, n), make([]int64, n)
		payloads                       = make([][]byte, n)
	)
	for i, index := range at {
		r := &rows[index]
		if lock && r.Lock {
			locks = append(locks, groupLock(r))
		}
		outboxes[i], groups[i], types[i] = r.Outbox, r.GroupKey, r.Type
		heads[i], payloads[i] = encodeHeaders(r.Headers), payloadOf(r)
		hashes[i], delays[i] = int64(r.Hash), r.Delay.Microseconds()
		if !r.DeliverAt.IsZero() {
			dues[i] = r.DeliverAt.UnixMicro()
		}
	}
	return []any{
		array(p.pgx, locks), array(p.pgx, outboxes), array(p.pgx, hashes), array(p.pgx, groups), array(p.pgx, types),
		array(p.pgx, payloads), array(p.pgx, heads), array(p.pgx, dues), array(p.pgx, delays),
	}
}

// payloadOf is never nil: a nil slice would be NULL.
func payloadOf(r *engine.Row) []byte {
	if r.Payload == nil {
		return []byte{}
	}
	return r.Payload
}

// lockGroups takes the group locks of rows that lie in several tables.
func (p *Postgres) lockGroups(ctx context.Context, tx engine.Tx, rows []engine.Row) error {
	var names []string
	var keys []int64
	for i := range rows {
		if rows[i].Lock {
			names = append(names, p.byOutbox[rows[i].Outbox].name.Messages())
			keys = append(keys, groupLock(&rows[i]))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	const lock = `
SELECT count(pg_advisory_xact_lock(s.k)) FROM (
	SELECT DISTINCT (u.name::regclass::oid::bigint << 32) | u.k AS k
	FROM unnest($1::text[], $2::bigint[]) AS u(name, k) ORDER BY 1) s`
	if _, err := tx.ExecContext(ctx, lock, array(p.pgx, names), array(p.pgx, keys)); err != nil {
		return fmt.Errorf("lock groups: %w", err)
	}
	return nil
}
