package engine

import "time"

// pause is a worker's wait between two runs.
type pause struct {
	timer *time.Timer
	deaf  bool          // wake-ups do not shorten this wait
	retry time.Duration // the last delay of a busy or faulty partition
}

func newPause() *pause {
	p := &pause{timer: time.NewTimer(time.Hour)}
	p.timer.Stop()
	return p
}

func (p *pause) stop() { p.timer.Stop() }

// wait returns true when the next run is due and false when quit is closed.
func (p *pause) wait(wake <-chan struct{}, quit <-chan struct{}) bool {
	if p.deaf {
		wake = nil
	}
	select {
	case <-quit:
		return false
	case <-wake:
	case <-p.timer.C:
	}
	select {
	case <-quit:
		return false
	default:
		return true
	}
}

// set arranges the wait after a run that ended with v.
func (p *pause) set(v verdict, w *worker) {
	p.timer.Stop()
	p.deaf = true
	switch v {
	case idle, moved:
		p.deaf, p.retry = false, 0
		if w.nextDue < 0 {
			return
		}
		p.timer.Reset(w.nextDue + time.Millisecond) // databases round
	case yield:
		p.retry = 0
		p.timer.Reset(yieldPause(w.took))
	case busy:
		p.timer.Reset(p.longer(busyMin, busyMax))
	case fault:
		p.timer.Reset(p.longer(faultMin, faultMax))
	case out:
		p.retry = 0
		d := w.config.Backoff.Delay(max(w.health.failures, 1))
		p.timer.Reset(min(max(d, minOutageDelay), maxOutageDelay))
	}
}

// longer doubles the delay from least to most.
func (p *pause) longer(least, most time.Duration) time.Duration {
	p.retry = min(max(p.retry*2, least), most)
	return jitter(p.retry)
}

// yieldPause is how long a partition that was served for d is left to others:
// long enough that nodes which keep asking for it get it now and then, short
// enough that a node alone does not notice.
func yieldPause(d time.Duration) time.Duration {
	return jitter(min(max(d/50, 500*time.Microsecond), 20*time.Millisecond))
}
