package dialect

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// pgOwn takes the lane's lock, as a statement of its own: the snapshot of the
// fetch must be younger than the lock, or it would show what the last owner
// has just deleted. What it found is left in a setting of the transaction, so
// that the fetch, which travels in the same packet, does nothing without it.
// A read-only server (a standby, a demoted primary) is found here, before
// anything is delivered that could not be recorded.
//
// The planner settings make the fetch walk its index whatever the statistics
// of a table that is empty at one moment and huge at the next. As that leaves
// one plan, prepared statements keep it: planning a fetch for its arguments, as
// the server would every time, takes as long as reading hundreds of messages.
const pgOwn = `
SELECT set_config('gormoutbox.owner', pg_try_advisory_xact_lock(` + pgLaneKey + `)::text, true),
	current_setting('transaction_read_only'),
	set_config('statement_timeout', '30s', true), set_config('lock_timeout', '10s', true),
	set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
	set_config('enable_sort', 'off', true), set_config('jit', 'off', true),
	set_config('plan_cache_mode', 'force_generic_plan', true)`

// Fragments of the statements. A lane is written with a range for its
// partition and ordered by it, so that no other index, the primary key above
// all, can pretend to give the order.
var pgFragments = strings.NewReplacer(
	"{lane}", `m.outbox = $1::text AND m.partitions = $3::smallint AND m.partition >= $2::smallint AND m.partition <= $2::smallint`,
	"{now}", `statement_timestamp()`,
	"{dueAt}", `COALESCE(m.due_at, CASE WHEN m.attempts = 0 THEN m.scheduled_at ELSE m.inserted_at END)`,
)

// A page is one statement, so that all of it has one snapshot: its first row
// is the head, the others are messages.
const (
	pgFetchHead = `
WITH head AS MATERIALIZED (
	SELECT CASE
		WHEN current_setting('gormoutbox.owner', true) IS DISTINCT FROM 'true' THEN 'busy'
		WHEN COALESCE((SELECT partitions FROM {meta} WHERE outbox = $1::text), 1) <> $3::smallint THEN 'moved'
		WHEN EXISTS (SELECT FROM {meta} WHERE outbox = $1::text AND paused_at IS NOT NULL) THEN 'paused'
		WHEN EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions < $3::smallint AND status = 'pending' AND scheduled_at IS NULL)
			OR EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions > $3::smallint AND status = 'pending' AND scheduled_at IS NULL)
			OR EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions < $3::smallint AND status = 'pending' AND scheduled_at IS NOT NULL)
			OR EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions > $3::smallint AND status = 'pending' AND scheduled_at IS NOT NULL){strayDead}
		THEN 'stray' ELSE 'open' END AS state
)`
	pgFetchFailed = `, failed AS MATERIALIZED (
	SELECT m.group_key, m.scheduled_at > {now} AS waiting FROM {messages} m
	WHERE {lane} AND m.status = 'pending' AND m.attempts > 0`
	pgFetchHeld = `
	UNION ALL
	SELECT m.group_key, true FROM {messages} m WHERE {lane} AND m.status = 'dead'`
	pgFetchPage = `
SELECT 0::bigint, COALESCE((SELECT installation FROM {meta} WHERE outbox = ''), ''), head.state, ''::bytea, '', 0, '', {now}, {now}, (
		SELECT m.scheduled_at FROM {messages} m WHERE {lane} AND m.status = 'pending' AND m.scheduled_at > {now}
		ORDER BY m.partition, m.scheduled_at LIMIT 1)
	FROM head
UNION ALL
({open}SELECT m.id, COALESCE(m.group_key, ''), m.type, m.payload, m.headers::text, m.attempts, '', m.inserted_at AS added, m.inserted_at, NULL::timestamptz
	FROM {messages} m
	WHERE (SELECT state FROM head) = 'open' AND {lane} AND m.status = 'pending' AND m.scheduled_at IS NULL{unblocked}{skip}
	ORDER BY m.partition, m.id LIMIT {limit}{close})
UNION ALL
({open}SELECT m.id, COALESCE(m.group_key, ''), m.type, m.payload, m.headers::text, m.attempts, COALESCE(m.last_error, ''), m.inserted_at, {dueAt}, m.scheduled_at
	FROM {messages} m
	WHERE (SELECT state FROM head) = 'open' AND {lane} AND m.status = 'pending' AND m.scheduled_at <= {now}{dueUnblocked}{skip}
	ORDER BY m.partition, m.scheduled_at, m.id LIMIT {limit}{close})`

	// A list that ends when its payloads come to the bound. It costs a few
	// percent, so it is used where payloads have been found to be large.
	pgBoundOpen  = `SELECT id, g, ty, p, h, a, e, i, d, s FROM (SELECT r.*, sum(octet_length(p)) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(p) AS before FROM (`
	pgBoundClose = `) AS r(id, g, ty, p, h, a, e, i, d, s)) b WHERE before <= {bytes}`
)

// pgStrayDead is for those who hold groups with a dead message.
const pgStrayDead = `
			OR EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions < $3::smallint AND status = 'dead')
			OR EXISTS (SELECT FROM {messages} WHERE outbox = $1::text AND partitions > $3::smallint AND status = 'dead')`

// Conditions that leave out what is blocked. A due retry goes out without its
// group's later messages, so that a page that ends within the retries cannot
// break the order: what comes anew is blocked by any failed message, a retry
// only by another that still waits.
const (
	pgUnblocked    = ` AND (m.group_key IS NULL OR m.group_key NOT IN (SELECT group_key FROM failed WHERE group_key IS NOT NULL))`
	pgDueUnblocked = ` AND (m.group_key IS NULL
		OR m.attempts > 0 AND m.group_key NOT IN (SELECT group_key FROM failed WHERE group_key IS NOT NULL AND waiting)
		OR m.attempts = 0 AND m.group_key NOT IN (SELECT group_key FROM failed WHERE group_key IS NOT NULL))`
	pgTotalUnblocked    = ` AND NOT EXISTS (SELECT FROM failed)`
	pgTotalDueUnblocked = ` AND NOT EXISTS (SELECT FROM failed WHERE waiting OR m.attempts = 0)`
	pgSkip              = ` AND m.id <> ALL ($4::bigint[]) AND (m.group_key IS NULL OR m.group_key <> ALL ($5::text[]))`
)

// pgShape is what the text of a fetch depends on; the limit is in the text
// because the planner should know it.
type pgShape struct {
	ordering engine.Ordering
	hold     bool
	skip     bool
	limit    int
	bytes    int // bound of the payloads; 0: left to the reader
}

// fetchStatement gives the statement that fetches a page.
func (t *pgTable) fetchStatement(native bool, page *pgPage) pgStatement {
	lane, q := page.lane, page.query
	shape := pgShape{q.Ordering, q.HoldDead, len(q.SkipGroups)+len(q.SkipIDs) > 0, q.Limit, 0}
	if page.bounded = t.large.Load(); page.bounded {
		shape.bytes = q.MaxBytes
	}
	args := []any{lane.Outbox, lane.Partition, lane.Partitions}
	if shape.skip {
		args = append(args, array(native, append([]int64{}, q.SkipIDs...)), array(native, append([]string{}, q.SkipGroups...)))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	text, ok := t.fetch[shape]
	if !ok {
		text = t.expand.Replace(pgFragments.Replace(shape.text()))
		t.fetch[shape] = text
	}
	return pgStatement{sql: text, args: args, read: page.read}
}

func (s pgShape) text() string {
	text := pgFetchHead
	if s.ordering != engine.None {
		text += pgFetchFailed
		if s.hold {
			text += pgFetchHeld
		}
		text += ")"
	}
	unblocked, dueUnblocked, skip, strayDead := "", "", "", ""
	if s.hold {
		strayDead = pgStrayDead
	}
	switch s.ordering {
	case engine.ByGroup:
		unblocked, dueUnblocked = pgUnblocked, pgDueUnblocked
	case engine.Total:
		unblocked, dueUnblocked = pgTotalUnblocked, pgTotalDueUnblocked
	}
	if s.skip {
		skip = pgSkip
	}
	open, closing := "", ""
	if s.bytes > 0 {
		open, closing = pgBoundOpen, strings.ReplaceAll(pgBoundClose, "{bytes}", fmt.Sprint(s.bytes))
	}
	return strings.NewReplacer(
		"{open}", open, "{close}", closing,
		"{unblocked}", unblocked, "{dueUnblocked}", dueUnblocked, "{skip}", skip, "{strayDead}", strayDead, "{limit}", fmt.Sprint(s.limit),
	).Replace(text + pgFetchPage)
}

// pgPage reads what a fetch returns.
type pgPage struct {
	lane         engine.Lane
	query        engine.Query
	state        string
	installation string
	now          time.Time
	nextDue      *time.Time
	ready, due   []engine.Envelope
	bytes        [2]int // of the payloads of ready and due
	bounded      bool   // the server ends the lists
	cut          bool   // at the bound of the bytes
}

// read takes in the rows. A message without a due time of its own is ready. Of
// each list it keeps no more than what alone fills a page.
func (p *pgPage) read(rows pgRows) error {
	for rows.Next() {
		var (
			env     engine.Envelope
			headers string
			due     *time.Time
		)
		err := rows.Scan(&env.ID, &env.GroupKey, &env.Type, &env.Payload, &headers, &env.Attempts, &env.LastError, &env.InsertedAt, &env.DueAt, &due)
		if err != nil {
			return err
		}
		if env.ID == 0 {
			p.installation, p.state, p.now, p.nextDue = env.GroupKey, env.Type, env.InsertedAt, due
			continue
		}
		env.Installation, env.Outbox, env.Partition = p.installation, p.lane.Outbox, p.lane.Partition
		env.ScheduledAt = env.InsertedAt
		if env.Headers, err = decodeHeaders(headers); err != nil {
			return fmt.Errorf("message %d: %w", env.ID, err)
		}
		if due == nil {
			p.keep(&p.ready, &p.bytes[0], env)
			continue
		}
		env.ScheduledAt = *due
		p.keep(&p.due, &p.bytes[1], env)
	}
	return rows.Err()
}

// A list of more than a few messages gets room for many at once: envelopes are
// large, so that growing step by step takes as long as reading them.
const fewMessages, manyMessages = 16, 1000

func (p *pgPage) keep(list *[]engine.Envelope, bytes *int, env engine.Envelope) {
	if p.cut = p.cut || *bytes > p.query.MaxBytes; *bytes <= p.query.MaxBytes {
		if len(*list) == fewMessages {
			*list = slices.Grow(*list, min(p.query.Limit, manyMessages))
		}
		*list = append(*list, env)
		*bytes += len(env.Payload)
	}
}

var pgStates = map[string]engine.PageState{
	"open": engine.PageOpen, "paused": engine.PagePaused, "moved": engine.PageMoved, "stray": engine.PageStray,
}

// page is what was read, merged into one order.
func (p *pgPage) page(t *pgTable) (engine.Page, error) {
	if p.state == "busy" {
		return engine.Page{}, engine.ErrBusy
	}
	state, ok := pgStates[p.state]
	if !ok {
		return engine.Page{}, fmt.Errorf("fetch: unexpected state %q", p.state)
	}
	page := engine.Page{State: state, Now: p.now, NextDue: -1}
	page.Envelopes, page.More = merge(p.due, p.ready, p.query)
	if p.bounded {
		p.cut = max(p.bytes[0], p.bytes[1]) > p.query.MaxBytes
	}
	page.More = page.More || p.cut
	// From now on the server ends the lists, as long as they come near the bound.
	switch full := p.bytes[0]+p.bytes[1] > p.query.MaxBytes/2; {
	case p.cut:
		t.large.Store(true)
	case !full && t.large.Load():
		t.large.Store(false)
	}
	if p.nextDue != nil {
		page.NextDue = p.nextDue.Sub(p.now)
	}
	return page, nil
}
