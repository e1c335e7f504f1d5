package dialect

import (
	"database/sql"
	"fmt"
	"strings"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Lanes and outboxes are found by walking an index from one value to the next
// (a loose index scan), which costs a descent for each, however many messages
// they have. A lane is one number there: its count * 65536 + its partition.
const (
	walkLanesText = `{walk}(k) AS (
	SELECT (SELECT CAST(partitions AS bigint) * 65536 + partition FROM {from}
		WHERE outbox = {outbox} AND {source} ORDER BY partitions, partition LIMIT 1)
	UNION ALL
	SELECT (SELECT CAST(partitions AS bigint) * 65536 + partition FROM {from}
		WHERE outbox = {outbox} AND {source} AND (partitions, partition) > (k / 65536, k % 65536)
		ORDER BY partitions, partition LIMIT 1)
	FROM {walk} WHERE k IS NOT NULL)`

	walkOutboxesText = `{walk}(k) AS (
	SELECT (SELECT outbox FROM {from} WHERE {source} ORDER BY outbox LIMIT 1)
	UNION ALL
	SELECT (SELECT outbox FROM {from} WHERE {source} AND outbox > k ORDER BY outbox LIMIT 1)
	FROM {walk} WHERE k IS NOT NULL)`
)

// The columns of a lane k. Its condition gives a range for the partition, by
// which lists are ordered first, so that only the index of the lane, and not
// the primary key, can give the order.
const (
	laneText  = `outbox = {outbox} AND partitions = k / 65536 AND partition >= k % 65536 AND partition <= k % 65536`
	countText = `(SELECT count(*) FROM (SELECT 1 FROM {from} WHERE {lane} AND {source}{and} ORDER BY partition LIMIT {max}) AS c)`

	// The messages at the head of the lane with the instant since when each
	// could have been delivered, and what they may wait for, by group. That of
	// a dead message that was retried is unknown; when it was added serves.
	oldestText = `(SELECT {least} FROM (SELECT g, min(since) AS since FROM (
	SELECT * FROM (SELECT {group} AS g, inserted_at AS since, 0 AS blocked FROM {messages_ready}
		WHERE {lane} AND status = 'pending' AND scheduled_at IS NULL ORDER BY partition, id LIMIT {max}) AS r
	UNION ALL
	SELECT * FROM (SELECT {group} AS g, CASE WHEN scheduled_at = {epoch} THEN inserted_at ELSE scheduled_at END AS since, 0 AS blocked FROM {messages_due}
		WHERE {lane} AND status = 'pending' AND scheduled_at <= {now} ORDER BY partition, scheduled_at, id LIMIT {max}) AS d{blockers}
	) AS h GROUP BY g HAVING max(blocked) = 0 OR g IS NULL) AS u)`

	blockersText = `SELECT * FROM (SELECT {group} AS g, CASE WHEN 1 = 0 THEN inserted_at END AS since, 1 AS blocked FROM {from}
		WHERE {lane} AND {source}{and} ORDER BY partition LIMIT {max}) AS c`
)

// statsSQL composes statements for one outbox of a table.
type statsSQL struct {
	syntax adminSyntax
	query  OutboxQuery
	outbox string // the placeholder
	now    string
}

// fill replaces what stands for the source and the given pairs, then what is
// the same in all texts, except the tables.
func (q statsSQL) fill(text string, s source, pairs ...string) string {
	text = strings.NewReplacer(append(pairs, "{source}", string(s), "{from}", s.table(), "{lane}", laneText)...).Replace(text)
	return strings.NewReplacer("{outbox}", q.outbox, "{now}", q.now, "{epoch}", q.syntax.epoch(),
		"{least}", q.syntax.micros("min(since)")).Replace(text)
}

// walk is the part of a statement that finds every value k of a walk through
// the messages that are not delivered, as the table found.
func (q statsSQL) walk(text string) string {
	var with, union []string
	for i, s := range []source{sourceReady, sourceScheduled, sourceDead} {
		walk := fmt.Sprintf("w%d", i)
		with = append(with, q.fill(text, s, "{walk}", walk))
		union = append(union, "SELECT k FROM "+walk)
	}
	return "WITH RECURSIVE " + strings.Join(with, ",\n") +
		",\nfound AS (SELECT k FROM (" + strings.Join(union, " UNION ") + ") AS w WHERE k IS NOT NULL)\n"
}

func (q statsSQL) count(s source, and string) string {
	return q.fill(countText, s, "{and}", and, "{max}", fmt.Sprint(MaxCounted))
}

// oldest is since when the oldest message could have been delivered, blocked or
// not.
func (q statsSQL) oldest() string {
	return q.fill(oldestText, "", "{group}", q.group(), "{max}", "1", "{blockers}", "")
}

// deliverable is the same for the oldest one that does not wait for another, as
// far as the head of the lane shows.
func (q statsSQL) deliverable() string {
	blockers := q.blockersIn(true, MaxCounted)
	if blockers != "" {
		blockers = "\n\tUNION ALL " + blockers
	}
	return q.fill(oldestText, "", "{group}", q.group(), "{max}", fmt.Sprint(maxLookedAt), "{blockers}", blockers)
}

// group is what a message's order is kept within. In Total order the lane is
// one group.
func (q statsSQL) group() string {
	if q.query.Ordering == engine.Total {
		return "'all'"
	}
	return "group_key"
}

// blockers are the sources of messages that hold their group.
func (q OutboxQuery) blockers() []source {
	switch {
	case q.Ordering == engine.None:
		return nil
	case q.HoldDead:
		return []source{sourceFailed, sourceDead}
	}
	return []source{sourceFailed}
}

// blockersIn selects the groups of up to limit blockers of each kind in the
// lane; empty if nothing blocks. A failed message that is due waits for nobody,
// though others wait for it: waiting leaves it out.
func (q statsSQL) blockersIn(waiting bool, limit int) string {
	var heads []string
	for _, s := range q.query.blockers() {
		and := ""
		if waiting && s == sourceFailed {
			and = " AND scheduled_at > {now}"
		}
		heads = append(heads, q.fill(blockersText, s, "{group}", q.group(), "{and}", and, "{max}", fmt.Sprint(limit)))
	}
	return strings.Join(heads, "\n\tUNION ALL ")
}

// blocked counts the groups of the lane that are blocked.
func (q statsSQL) blocked() string {
	blockers := q.blockersIn(false, MaxBlockedCounted)
	if blockers == "" {
		return "0"
	}
	return "(SELECT count(DISTINCT g) FROM (" + blockers + ") AS b)"
}

// outboxesIn lists the outboxes that have undelivered messages in a table.
func (l look) outboxesIn(name tables.Name) ([]string, error) {
	s := l.statement(name)
	s.add(statsSQL{syntax: l.syntax}.walk(walkOutboxesText) + "SELECT k FROM found ORDER BY k")
	var outboxes []string
	err := s.query(l.ctx, l.tx, func(rows *sql.Rows) error {
		var outbox string
		err := rows.Scan(&outbox)
		outboxes = append(outboxes, outbox)
		return err
	})
	return outboxes, err
}

// lanes describes the lanes that hold pending or dead messages.
func (l look) lanes(name tables.Name, outbox OutboxQuery) ([]LaneStats, error) {
	s := l.statement(name)
	q := statsSQL{syntax: l.syntax, query: outbox, outbox: s.arg(outbox.Name), now: l.syntax.now()}
	columns := []string{
		"k",
		q.count(sourceReady, ""),
		q.count(sourceScheduled, " AND scheduled_at <= {now}"),
		q.count(sourceScheduled, " AND scheduled_at > {now}"),
		q.count(sourceDead, ""),
		q.blocked(),
		q.oldest(),
		q.deliverable(),
	}
	s.add(q.walk(walkLanesText) + "SELECT " + strings.Join(columns, ",\n") + "\nFROM found ORDER BY k")
	var lanes []LaneStats
	err := s.query(l.ctx, l.tx, func(rows *sql.Rows) error {
		lane, err := scanLane(rows)
		lanes = append(lanes, lane)
		return err
	})
	return lanes, err
}

func scanLane(rows *sql.Rows) (LaneStats, error) {
	var lane LaneStats
	var k int64
	var ready, due int
	var oldest, deliverable sql.NullInt64
	err := rows.Scan(&k, &ready, &due, &lane.Waiting, &lane.Dead, &lane.BlockedGroups, &oldest, &deliverable)
	lane.Partitions, lane.Partition = int(k>>16), int(k&0xffff)
	lane.Due = min(ready+due, MaxCounted)
	lane.OldestDue, lane.deliverable = microTime(oldest), microTime(deliverable)
	return lane, err
}

// blocked lists the heads of the blocked groups of an outbox.
func (l look) blocked(name tables.Name, q OutboxQuery) ([]BlockedGroup, error) {
	s := l.statement(name)
	outbox := s.arg(q.Name)
	grouped := " AND group_key IS NOT NULL"
	if q.Ordering == engine.Total {
		grouped = ""
	}
	for i, source := range q.blockers() {
		if i > 0 {
			s.add("\nUNION ALL ")
		}
		s.addf(`SELECT * FROM (SELECT group_key, id, partition, attempts, last_error, CASE WHEN status = 'pending' THEN %s END AS next_retry
	FROM %s WHERE outbox = %s AND %s%s ORDER BY partitions, partition, id LIMIT %d) AS s%d`,
			l.syntax.micros("scheduled_at"), source.table(), outbox, source, grouped, MaxBlockedListed, i)
	}
	s.addf("\nLIMIT %d", MaxBlockedListed)
	var groups []BlockedGroup
	err := s.query(l.ctx, l.tx, func(rows *sql.Rows) error {
		var g BlockedGroup
		var key, lastError sql.NullString
		var next sql.NullInt64
		err := rows.Scan(&key, &g.ID, &g.Partition, &g.Attempts, &lastError, &next)
		g.GroupKey, g.LastError, g.NextRetry = key.String, lastError.String, microTime(next)
		groups = append(groups, g)
		return err
	})
	return groups, err
}
