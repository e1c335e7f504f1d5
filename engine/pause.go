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

// set arranges the wait after a run.
func (p *pause) set(end ending, w *worker) {
	p.timer.Stop()
	p.deaf = true
	switch end.verdict {
	case idle:
		p.deaf, p.retry = false, 0
		if end.nextDue >= 0 {
			p.timer.Reset(end.nextDue + time.Millisecond) // databases round
		}
	case yield:
		p.retry = 0
		p.timer.Reset(yieldPause(end.took, w.engine.hasRivals()))
	case busy, moved:
		p.timer.Reset(p.longer(busyMin, busyMax))
	case fault:
		p.timer.Reset(p.longer(faultMin, faultMax))
	case out:
		p.retry = 0
		d := w.config.Backoff.Delay(max(end.failures, 1))
		p.timer.Reset(min(max(d, minOutageDelay), maxOutageDelay))
	}
}

// longer doubles the delay from least to most.
func (p *pause) longer(least, most time.Duration) time.Duration {
	p.retry = min(max(p.retry*2, least), most)
	return jitter(p.retry)
}

// yieldPause is how long a partition that was served for d is left to others:
// so short that a node alone does not notice, and yet nodes which keep asking
// get it now and then. Where somebody is known to ask, it is long enough for
// partitions to change hands every few seconds.
func yieldPause(d time.Duration, rivals bool) time.Duration {
	if rivals {
		return jitter(min(max(d/8, 2*time.Millisecond), 100*time.Millisecond))
	}
	return jitter(min(max(d/50, 500*time.Microsecond), 20*time.Millisecond))
}
